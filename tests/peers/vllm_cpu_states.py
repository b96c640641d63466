"""vLLM's connector of hidden states on a machine without a GPU, where its own calls CUDA for streams and events.

Named in the line that starts a server, in an environment with vLLM (see `vllm_counts.py`) and this folder on its path:

    PYTHONPATH=tests/peers vllm serve TARGET --speculative-config '{"method": "extract_hidden_states", ...}' \
        --kv-transfer-config '{"kv_connector": "OnCpu", "kv_connector_module_path": "vllm_cpu_states", ...}'
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    extract_from_kv_cache,
)


class Done:
    """An event of a copy that has been made."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class OnCpu(ExampleHiddenStatesConnector):
    """Copies the states at once; files, locks and threads are as in vLLM's own."""

    def _submit_async_write(self, pending) -> None:
        blocks = torch.tensor(pending.block_ids)[:, None] * self._block_size
        slots = (blocks + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids)).clone()
        lock = self._lock_fds.pop(pending.req_id)
        tensors = {"hidden_states": states, "token_ids": pending.token_ids.clone()}
        self._req_copy_events[pending.req_id] = Done()
        future = self._executor.submit(self._write_tensors, tensors, Done(), pending.filename, lock)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(lambda done: self._on_write_done(pending.req_id, done))
