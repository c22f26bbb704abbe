//! The code blocks of the README and of the pages in `docs`, compiled and run as tests of documentation.

#[doc = include_str!("../../../README.md")]
mod readme {}

#[doc = include_str!("../../../docs/adoption.md")]
mod adoption {}

#[doc = include_str!("../../../docs/migrating.md")]
mod migrating {}
