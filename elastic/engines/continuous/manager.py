"""transformers' continuous batching with our cache, scheduler and sampling: the parts that had to be replaced.

Written against transformers 5.23 (`compatibility.py`); each override says what the stock method does instead.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.continuous_api import (
    ContinuousBatchingManager,
    ContinuousBatchProcessor,
    OutputRouter,
)
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.generation.continuous_batching.utils import stream_context

from elastic.engines.continuous.cache import ElasticPagedCache
from elastic.engines.continuous.scheduler import ElasticScheduler, SchedulerListener

logger = logging.getLogger(__name__)
Chooser = Callable[[list[str], torch.Tensor], torch.Tensor]
"""The next tokens [requests] for requests by name and logits [requests, vocabulary]."""


class RequestOutputRouter(OutputRouter):  # type: ignore[misc]
    """Hands outputs to one function, on the engine's thread; the stock one to queues and event loops."""

    deliver: Callable[[GenerationOutput], None]

    def deliver_batch(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            self.deliver(output)


class SamplingModelRunner(ModelRunner):  # type: ignore[misc]
    """Samples each request by its own rule; the stock one has one rule for all."""

    choose: Chooser

    def compute_batch(self, model: torch.nn.Module, batch_data: dict[str, Any]) -> None:
        """Run one forward pass, without the stock mask of all tokens against all."""
        stream = self.inputs_and_outputs.compute_stream
        if stream is not None:  # the inputs, and zeros in new blocks, are written on this thread's stream
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with stream_context(stream):
            # attention knows what each token sees: a finished mask keeps the model from building one of all against all
            batch_data["attention_mask"] = batch_data["input_ids"].new_ones((1, 1, 1, 1), dtype=torch.bool)
        batch_data.pop("is_causal", None)  # it would be written to the config, which forwards of other threads read
        super().compute_batch(model, batch_data)

    def _sample(self, scores: torch.Tensor, output_ids: torch.Tensor) -> None:
        entries = self.inputs_and_outputs.requests_in_batch
        names = [entry.state.request_id for entry in entries if entry.has_new_token]
        if names:
            output_ids[0, : len(names)].copy_(self.choose(names, scores[0, : len(names)]))


class ElasticManager(ContinuousBatchingManager):  # type: ignore[misc]
    """Owns the thread that computes. `cache` outlives it until `close`."""

    def __init__(
        self,
        model: Any,
        cache: ElasticPagedCache,
        listener: SchedulerListener,
        deliver: Callable[[GenerationOutput], None],
        choose: Chooser,
        max_requests: int,
    ) -> None:
        self.cache = cache
        self.scheduler = ElasticScheduler(cache, max_requests, listener)
        self._choose = choose
        settings = ContinuousBatchingConfig(
            max_batch_tokens=cache.max_batch_tokens,
            max_requests_per_batch=max_requests,
            max_blocks_per_request=0,
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=False,
            allow_block_sharing=cache.allow_block_sharing,
        )
        super().__init__(model, GenerationConfig(), settings)
        self.output_router = RequestOutputRouter()
        self.output_router.deliver = deliver

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that computes."""
        return self._generation_thread

    def start(self) -> None:
        """Start the thread, as a daemon: a program that forgot to stop the stock one would never end."""
        self.background_thread_status.clear()
        self._generation_thread = threading.Thread(target=self._run_generation_loop, name="elastic-engine", daemon=True)
        self._generation_thread.start()

    def wake(self) -> None:
        """Look again whether a request can go on."""
        self._wake_up_loop.set()

    def switch_to_cb_friendly_attn(self, model: Any, auto_switch_to_flash: bool = True) -> None:
        """Do nothing: the attention that `wrap` set knows this cache. (Stock: to flash attention or another one.)"""

    def _create_batch_processor(self) -> ContinuousBatchProcessor:
        """Make what puts batches together, with a runner that samples by request."""
        config = copy.copy(self.model.config.get_text_config())
        config._attn_implementation_internal = (
            "elastic_sdpa"  # under this name no mask of all tokens against all is made
        )
        processor = ContinuousBatchProcessor(
            cache=self.cache,
            config=config,
            generation_config=self.generation_config,
            continuous_batching_config=self.continuous_batching_config,
            logit_processor=self.logit_processor,
            input_queue=self.input_queue,
            cancel_queue=self.cancel_queue,
            output_router=self.output_router,
            background_thread_status=self.background_thread_status,
            model_device=self.model.device,
            model_dtype=self.model.dtype,
            scheduler=self.scheduler,
            distributed_helper=self.distributed_helper,
        )
        runner = SamplingModelRunner(
            logit_processor=self.logit_processor,
            cb_config=self.continuous_batching_config,
            inputs_and_outputs=processor.inputs_and_outputs,
            cache=self.cache,
            do_sample=False,
            return_logprobs=False,
        )
        runner.choose = self._choose
        processor.model_runner = runner
        return processor

    def _generation_step(self) -> None:
        """Run one forward pass. An error fails the requests in it; the stock one fails all, and ends the loop."""
        try:
            super()._generation_step()
        except Exception as error:  # whatever the model raises ends its batch, and each request in it; the others go on
            logger.exception("a forward pass of continuous batching failed; the requests in it end")
            batch = self.batch_processor.inputs_and_outputs
            batch.retrieve_device_outputs()  # its kernels still read the inputs, and write blocks that are freed now
            failed, batch.requests_in_batch = batch.requests_in_batch, []
            for entry in failed:
                self.batch_processor._handle_request_error(error, entry.state)
                self.scheduler.finish_request(entry.state.request_id)
