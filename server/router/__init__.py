"""The only room that knows text: HTTP in, token ids out to the workers."""
