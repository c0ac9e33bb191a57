"""What is done with a model that is there: a run, a checkpoint, a Hugging Face directory or an adapter.

    a path -> training/start/open_saved -> evaluate    losses of the recipe's sets
                                        -> tasks       scores of lm-eval's tasks
                                        -> generate    texts and conversations
                                        -> export      a directory that transformers or PEFT loads

evaluate       validation loss, perplexity, bits per byte
tasks          tasks of lm-eval from local files (`evaluate --tasks`)
generate       text and conversations
sampling       how a token is chosen, and how many
prompts        what a text goes on from: texts, messages, a file of either
export         a checkpoint as a Hugging Face directory, loaded back and compared

Inside:

model_card     README.md of an export
export_adapter an adapter merged into its base, or as PEFT's files
"""
