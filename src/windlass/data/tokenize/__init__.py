"""Text -> token ids.

tokenizer         trains a byte-level BPE or loads a tokenizer; the bytes of each token
tiktoken_encoder  the same ids through tiktoken, or not at all
pool              documents -> token ids in a pool of processes with bounded memory
resume            finished parts of a tokenisation, so that a killed preparation continues
chat_template     conversations -> ids through the tokenizer's template, and which ids are learned
template_files    what a tokenizer's files say of its chat template
encode_rows       conversations and pairs -> ids with flags, in the same kind of pool
cores             how many cores this process may use
fitting           what is longer than a sequence: refused, dropped, or its prompts cut
preferences       preference pairs -> ids, one pair a sample
fill_in_middle    documents whose middle is moved behind their end, with marks between
flags             one number per token: its id, and whether it is a target, ends a turn, ends an answer of a pair

Inside:

chat_samples      a conversation as one sample, or one of each answer; which ids of it may be cut
answer_spans      where an answer begins and ends in a template's text
template_tokens   the text of a template -> ids, and where each begins
end_of_text       which token ends a document, wherever a tokenizer's files say it
"""
