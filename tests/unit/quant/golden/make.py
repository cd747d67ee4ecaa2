"""Makes the golden files beside it: small checkpoints by the packages themselves, and the logits they give.

Not a test: it needs packages that cannot all be installed together. README.md says with which versions each part ran.

    python make.py base BASE                    # transformers
    python make.py gptqmodel BASE OUT           # gptqmodel, optimum
    python make.py autoawq BASE OUT             # autoawq
    python make.py auto-gptq BASE OUT           # auto-gptq, peft
    python make.py logits OUT/FORMAT [...]      # transformers, gptqmodel, optimum
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96
GROUP = 32
GPTQ_FORMATS = {
    "gptq-4bit": {"bits": 4, "sym": True, "desc_act": False, "format": "gptq"},
    "gptq-4bit-act-order": {"bits": 4, "sym": True, "desc_act": True, "format": "gptq"},
    "gptq-3bit": {"bits": 3, "sym": True, "desc_act": False, "format": "gptq"},
    "gptq-8bit": {"bits": 8, "sym": True, "desc_act": False, "format": "gptq"},
    "gptq-v2-asymmetric": {"bits": 4, "sym": False, "desc_act": False, "format": "gptq_v2"},
}


def base(path: Path) -> None:
    """A random Llama, some of whose inputs are larger than others, as in trained models."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        initializer_range=0.12,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = LlamaForCausalLM(config).half()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = (0.5 * torch.randn(parameter.shape)).exp().half()
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)


def tokenizer() -> Any:
    """One that GPTQModel and AutoAWQ can load; nothing uses it."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<{i}>": i for i in range(VOCABULARY)}
    words_only = Tokenizer(models.WordLevel(words, unk_token="<2>"))
    return PreTrainedTokenizerFast(tokenizer_object=words_only, bos_token="<0>", eos_token="<1>", pad_token="<2>")


def calibration() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (64, 128), generator=generator).tolist()


def gptqmodel(source: Path, out: Path) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in calibration()]
    for name, options in GPTQ_FORMATS.items():
        model = GPTQModel.load(str(source), QuantizeConfig(group_size=GROUP, offload_to_disk=False, **options))
        model.quantize(rows, batch_size=8)
        model.save(str(out / name))


def autoawq(source: Path, out: Path) -> None:
    from awq import AutoAWQForCausalLM

    model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", torch_dtype=torch.float16)
    options = {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}
    model.quantize(None, quant_config=options, calib_data=calibration(), max_calib_seq_len=128)
    model.save_quantized(str(out / "awq-gemm"))


def auto_gptq(source: Path, out: Path) -> None:
    """Its quantizer needs CUDA; its packer does not: nearest codes, asymmetric, with an act-order made up."""
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.float16)
    tensors = {k: v for k, v in model.state_dict().items() if "_proj" not in k}
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            packed = QuantLinear(4, GROUP, module.in_features, module.out_features, False)
            packed.pack(module, *_nearest(module.weight.data.float()))
            parts = {part: getattr(packed, part) for part in ("qweight", "qzeros", "scales", "g_idx")}
            tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items()}
    folder = out / "auto-gptq"
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    options = {"bits": 4, "group_size": GROUP, "desc_act": True, "sym": False, "quant_method": "gptq"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": options}, indent=2))


def _nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scales and zeros, [outputs, groups], of groups that are scattered over the inputs; and the group of each."""
    inputs = weight.shape[1]
    groups = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs)) % (inputs // GROUP)
    gathered = torch.stack([weight[:, groups == group] for group in range(inputs // GROUP)], 1)
    low, high = gathered.amin(2).clamp(max=0), gathered.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half().float()
    return scales, (-low / scales).round().clamp(1, 15), groups.int()


def logits(folder: Path) -> None:
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu", dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(2)
    input_ids = torch.randint(3, VOCABULARY, (2, 24), generator=generator)
    with torch.inference_mode():
        output = model(input_ids).logits
    kernel = type(model.model.layers[0].mlp.up_proj).__name__
    save_file({"input_ids": input_ids, "logits": output.float()}, folder / "logits.safetensors", {"kernel": kernel})
    print(folder.name, kernel)
    for file in folder.iterdir():
        if file.name not in ("config.json", "model.safetensors", "logits.safetensors"):
            file.unlink()


def main() -> None:
    what, *paths = sys.argv[1], *map(Path, sys.argv[2:])
    if what == "logits":
        for path in paths:
            logits(path)
    else:
        {"base": base, "gptqmodel": gptqmodel, "autoawq": autoawq, "auto-gptq": auto_gptq}[what](*paths)


if __name__ == "__main__":
    main()
