"""The decoding algorithms and the models that they run. Knows nothing of Ray, files or jobs.

Tensors carry their shape in their names (`tokens_BT`). The letters of all files; a file's own legend has only what it uses in
addition, or in another sense:

    S  all slots                                       B  the slots, or samples, of this step
    T  rows or tokens of a slot                        R, N  flat rows: those of all slots one after another
    C  content rows of a slot                          Q  query rows of a slot
    W  columns of a slot, positions of a canvas        L, P  positions of one canvas
    K  most drafts of a slot                           V  vocabulary
    D  width of the model                              H  heads, d  width of a head
"""
