"""What ranks say to each other on the host, beside the training's collectives, with few connections; and what each holds.

meeting     where they meet before the first step, and who has not come
awaited_work  what one rank does while others wait, outside any collective; how its failure reaches them
tree        a group as a binomial tree: gather, reduce and broadcast of Python values, log2 N peers per rank
stopping    the step after which all stop, where one of them was signalled
owned_part  which part of a tensor this rank holds
open_files  how many files a process may have open

Inside:

host_page   a page of memory that the ranks of one host share: one of them asks the store, the others read what it heard
"""
