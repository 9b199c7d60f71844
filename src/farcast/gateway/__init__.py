"""The HTTP side of a fleet: the sidecar in front of one engine, the gateway in front of many.

Needs the extra `serve`; nothing is imported here, so that `--help` costs nothing.
"""
