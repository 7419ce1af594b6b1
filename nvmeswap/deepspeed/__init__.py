"""DeepSpeed's NVMe swappers, replaced; its users keep their script and their JSON.

Not built yet. Here will stand the classes that take the place of DeepSpeed's own parameter and
optimizer swappers, with every DeepSpeed name they touch in one file, checked by version.
"""
