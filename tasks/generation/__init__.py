"""Every prompt answered once, with its thinking, whatever crashes."""
