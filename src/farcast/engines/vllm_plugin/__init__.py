"""farcast inside vLLM's processes, loaded through the entry point `vllm.general_plugins`.

vLLM calls `register` in every process it starts. Nothing else happens until the server is
started with `--weight-transfer-config '{"backend": "farcast"}'` and
`--worker-extension-cls farcast.engines.vllm_plugin.worker.FarcastWorker`.
"""

BACKEND = "farcast"
EXTENSION = "farcast.engines.vllm_plugin.worker.FarcastWorker"


def register() -> None:
    """Name the transfer engine to vLLM. Safe to repeat."""
    from farcast.engines.vllm_plugin import registration

    registration.register(BACKEND)


__all__ = ["BACKEND", "EXTENSION", "register"]
