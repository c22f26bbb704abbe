//! Several Redis processes that belong together.

use super::Reply;
use super::node::Node;
use crate::Error;
use crate::server::Server;

/// The processes of a group, which tests identify by port.
#[derive(Debug, Default)]
pub(super) struct Group(Vec<Node>);

impl Group {
    pub(super) fn push(&mut self, node: Node) {
        self.0.push(node);
    }

    pub(super) fn nodes(&self) -> &[Node] {
        &self.0
    }

    pub(super) fn ports(&self) -> Vec<u16> {
        self.0.iter().map(Node::port).collect()
    }

    /// The addresses: `127.0.0.1:PORT,127.0.0.1:PORT,…`.
    pub(super) fn addresses(&self) -> String {
        self.ports().iter().map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",")
    }

    /// The running nodes that are not paused.
    pub(super) fn up(&self) -> impl Iterator<Item = &Node> {
        self.0.iter().filter(|node| node.is_up())
    }

    pub(super) fn get(&self, port: u16) -> Result<&Node, Error> {
        self.0.iter().find(|node| node.port() == port).ok_or_else(|| stranger(port))
    }

    pub(super) fn get_mut(&mut self, port: u16) -> Result<&mut Node, Error> {
        self.0.iter_mut().find(|node| node.port() == port).ok_or_else(|| stranger(port))
    }

    /// Fails if a node is paused or not running, because waiting would be in vain.
    pub(super) fn expect_all_up(&self) -> Result<(), Error> {
        match self.0.iter().find(|node| !node.is_up()) {
            Some(node) => Err(Error::failed(format!("the server on port {} is paused or does not run", node.port()))),
            None => Ok(()),
        }
    }

    /// Repeats `check` until it succeeds. The error shows its last failure.
    pub(super) fn wait_until_sound<T>(&self, mut check: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
        let (mut found, mut objection) = (None, String::new());
        let Some(node) = self.0.first() else { return check() };
        let waited = node.wait_until("and its group did not come to rest", || {
            match check() {
                Ok(value) => found = Some(value),
                Err(error) => objection = error.to_string(),
            }
            Ok(found.is_some())
        });
        match (found, waited) {
            (Some(value), _) => Ok(value),
            (None, Err(Error::Failed { what, log })) => {
                Err(Error::Failed { what: format!("{what}: {objection}"), log })
            }
            (None, Err(error)) => Err(error),
            (None, Ok(())) => Err(Error::failed(objection)),
        }
    }
}

fn stranger(port: u16) -> Error {
    Error::failed(format!("no server of the group has the port {port}"))
}

/// A field of a node's `INFO`.
pub(super) fn field<'a>(node: &Node, info: &'a Reply, name: &str) -> Result<&'a str, Error> {
    info.field(name).ok_or_else(|| Error::failed(format!("the server on port {} has no {name}", node.port())))
}
