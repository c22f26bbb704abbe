#![doc = include_str!("../README.md")]

mod access;
mod console;
mod cursor;
mod forgery;
mod pages;
mod router;
mod survey;
mod visit;

pub use self::access::{Access, Permissions};
pub use self::console::Console;
