"""Joins both wings: processes, IPC, tokenizer and detokenizer, the asynchronous engine, `LLM`."""
