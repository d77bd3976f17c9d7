"""The CPU's native step: its library, its program text and its packed weights. The C interface is in slipstream.h."""
