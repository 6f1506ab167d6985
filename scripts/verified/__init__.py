"""Trained models, compared with transformers, PEFT and llama.cpp: the table of docs/reference/models.md.

`models` says which models and prompts, `peer` what transformers and PEFT compute in 32-bit floats (the only module that needs
torch), `served` what a deployment answers, `comparison` how far the two are apart, `table` the page.
"""
