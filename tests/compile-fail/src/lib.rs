//! Code that must not compile: contracts that a store cannot keep, and layers that do not know to which scope keys belong. The
//! tests are one crate, because each such crate checks all its dependencies again.
