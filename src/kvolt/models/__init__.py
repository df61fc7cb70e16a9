"""Model files: a name to a folder, files to tensors, configuration, tokenizer and model card."""
