//! Nothing: the tests in a browser are in `tests`. `cargo xtask test-browser` runs them.
