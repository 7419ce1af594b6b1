from setuptools import setup

# The C code uses Python's stable interface only: one build serves 3.10 and every later one.
setup(
    cffi_modules=["native/build.py:ffibuilder"],
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
