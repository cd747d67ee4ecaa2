"""Quantized checkpoints of other packages (AutoGPTQ, GPTQModel, AutoAWQ), read to the bit.

Way in: `reader.QuantizedCheckpoint`. `elastic.quant.variants` imports it; it imports `elastic.quant.formats`.
"""
