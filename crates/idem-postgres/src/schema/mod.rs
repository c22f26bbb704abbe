//! The schema: its name, its migrations, and its optional layout in partitions.

pub(crate) mod migrate;
pub(crate) mod name;
pub(crate) mod partitions;
