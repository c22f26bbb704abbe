#![doc = include_str!("../README.md")]

mod access;
mod console;
mod forgery;
mod pages;
mod survey;

pub use self::access::{Access, Permissions};
pub use self::console::Console;
