"""What ranks say to each other on the host, beside the training's collectives, with few connections.

meeting     where they meet before the first step, and who has not come
tree        a group as a binomial tree: gather, reduce, broadcast and scatter of Python values, log2 N peers per rank
stopping    the step after which all stop, where one of them was signalled
open_files  how many files a process may have open

Inside:
host_page   a page of memory that the ranks of one host share: one of them asks the store, the others read what it heard
"""
