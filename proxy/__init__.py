"""gpu-lease-proxy: every model waits for its turn on the GPU before the request is sent, not inside it."""

__version__ = "0.1.0.dev0"
