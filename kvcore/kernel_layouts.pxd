# Nothing here for other modules: the loops are in kernel_metadata.pxd.
