//! What other roles of the database can do to a store, and what its own role needs.

mod hostile;
mod layout;
mod locks;
mod names;
mod qualified;
mod traps;
mod work;
