"""One flat view of whatever bytes a caller hands over."""


def byte_view(data: bytes | memoryview) -> memoryview:
    """`data` as a one-dimensional view of unsigned bytes; copied only if it is not contiguous."""
    view = memoryview(data)
    if view.nbytes == 0:
        return memoryview(b"")
    if not view.c_contiguous:
        return memoryview(view.tobytes())
    return view.cast("B")
