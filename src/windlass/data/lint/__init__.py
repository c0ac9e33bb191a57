"""What is in prepared data, and what is wrong with it.

statistics         counts of a set, and one sample to read
lint               runs the checks below over a set
findings           codes, severity and remedy of everything lint can find
overview           all of a preparation for one page

Inside:

documents          samples as they are stored, and the documents in them
check_ids          ids and labels: masks, document borders, vocabulary, copies
check_preferences  preference pairs
check_text         the text of documents
check_tokenizer    the tokenizer of a preparation
"""
