"""The console: sources of frames, views that draw them as lines of text, and the Textual app that shows those."""
