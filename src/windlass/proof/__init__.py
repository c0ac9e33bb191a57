"""`windlass verify`: the recipe's layout, proved equal to one process on a tiny proxy model.

    verify -> fold_layout -> proxy ----> watch (the real training, on the pool) ----> compare -> verdict
                                  '----> reference_run -> reference (one process) ---'

verify         folds, trains both, compares, prints

Inside:

fold_layout    a layout folded to the ranks at hand
proxy          a small model and data set with everything that can make a layout wrong
proxy_adapter  the recipe's adapter in that model, and the same one for the reference
proxy_data     what that model learns
watch          the real training on the pool's ranks, watched
reference_run  rows, model and training of one process
reference      the same training in torch and transformers alone; shares no code with the layouts
reference_adapter  low-rank factors and NF4 in that oracle
reference_preference  the losses of pairs in it
reference_routers  the routers' loss and loads in it
verdict        what is printed and written of each layout
compare        a layout's numbers against those of one process
pool           a pool of gloo ranks that serves many small cases per start
"""
