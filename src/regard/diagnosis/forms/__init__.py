"""Functions, classes and modules of every form, to be called as functions of the usual one."""
