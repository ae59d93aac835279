// Compiled once per instruction set as kernels_isa.cpp is, but with -ffp-contract=off.
#include "codec.inl"
