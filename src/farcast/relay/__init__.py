"""A region's cache: each object crosses the long line once, and neighbours get it from here.

Needs the extra `serve`; nothing is imported here, so that `--help` costs nothing.
"""
