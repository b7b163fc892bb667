"""The target's text side: tokenizer, chat template, markers. Shared by every room."""
