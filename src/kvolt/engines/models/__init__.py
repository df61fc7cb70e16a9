"""Finding, fetching and reading models: ids to files, files to tensors, tokenizer and card."""
