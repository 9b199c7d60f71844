"""farcast under other people's trainers. Each module needs the library it is named after, so none
is loaded here: `farcast.interop.transformers`, `farcast.interop.trl`."""
