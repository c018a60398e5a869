"""Rows to canvases, and outcomes to result rows: readers, prompts, masks, infills, chat templates, tokenizers, stop texts."""
