"""Any `nn.Module` on one device, its layers in RAM or on NVMe until they are used.

Not built yet. Here will stand the manager that wraps a module without a sharding library, for
training and for inference: the user's loop stays as it is, the model's layers come and go.
"""
