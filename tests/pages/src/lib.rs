//! The code blocks of the pages in `docs`, compiled and run as tests of documentation.

#[doc = include_str!("../../../docs/adoption.md")]
mod adoption {}
