"""The native numerics, written down as numpy: what every value of a compiled CPU step is, bit by bit.

The native executor promises the same bits on every instruction set and with any number of threads. That is possible
because each value has one definition, with its order of operations, and this package is that definition. It is slow
and plain on purpose, and uses nothing but numpy. Where nothing else is said, arithmetic is float32, rounded to nearest
(ties to even), and `fma` is a product and a sum with one rounding. A NaN is a NaN: sign and payload are not defined.
"""
