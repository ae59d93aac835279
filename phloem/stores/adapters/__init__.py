"""One file (or package) per backend; its name is the backend's. It has `build(options)`.

Adding a backend is adding a file: nothing else names them. They do not import each other.
"""
