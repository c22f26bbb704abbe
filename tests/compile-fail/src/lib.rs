//! What must not compile: contracts that a store cannot keep, and layers that do not know to whom keys belong. The tests are one
//! crate, since each such crate has all its dependencies checked once more.
