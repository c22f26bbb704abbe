//! A connection to one server or to a Cluster, and the commands on it.

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::{Cmd, Pipeline, RedisResult, Value};

/// A multiplexed connection: concurrent callers share it without waiting for each other's replies.
#[derive(Clone)]
pub(crate) enum Connection {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Connection {
    /// Sends commands to the server that has `key`, on one connection to it.
    ///
    /// `asking` is the server that an `ASK` redirect names while the slot of the key moves. `ASKING` permits only the next
    /// command on the connection, which other callers use as well. So both go out in one pipeline, and only the first of
    /// `commands` may have a key.
    pub(crate) async fn send(
        &mut self,
        mut commands: Vec<Cmd>,
        key: &[u8],
        asking: Option<&Asking>,
    ) -> RedisResult<Vec<Value>> {
        match (self, asking) {
            (Self::One(connection), _) if commands.len() == 1 => {
                Ok(vec![connection.req_packed_command(&commands.remove(0)).await?])
            }
            (Self::One(connection), _) => {
                let pipeline = pipeline(commands);
                connection.req_packed_commands(&pipeline, 0, pipeline.len()).await
            }
            (Self::Cluster(connection), None) if commands.len() == 1 => {
                let route = RoutingInfo::SingleNode(primary_of(key));
                Ok(vec![connection.route_command(commands.remove(0), route).await?])
            }
            (Self::Cluster(connection), None) => {
                let pipeline = pipeline(commands);
                let count = pipeline.len();
                connection.route_pipeline(pipeline, 0, count, primary_of(key)).await
            }
            (Self::Cluster(connection), Some(Asking { host, port })) => {
                let pipeline = pipeline(std::iter::once(redis::cmd("ASKING")).chain(commands));
                let count = pipeline.len();
                let there = SingleNodeRoutingInfo::ByAddress { host: host.clone(), port: *port };
                let mut answers = connection.route_pipeline(pipeline, 0, count, there).await?;
                answers.remove(0);
                Ok(answers)
            }
        }
    }

    /// Sends a command to every primary, and returns all replies.
    pub(crate) async fn ask_all(&mut self, command: Cmd) -> RedisResult<Vec<Value>> {
        match self {
            Self::One(connection) => Ok(vec![connection.req_packed_command(&command).await?.extract_error()?]),
            Self::Cluster(connection) => {
                let everybody = RoutingInfo::MultiNode((MultipleNodeRoutingInfo::AllMasters, None));
                match connection.route_command(command, everybody).await?.extract_error()? {
                    Value::Map(answers) => Ok(answers.into_iter().map(|(_, answer)| answer).collect()),
                    other => Ok(vec![other]),
                }
            }
        }
    }
}

/// The server that has a key while its slot moves, from an `ASK` redirect.
#[derive(Debug, Clone)]
pub(crate) struct Asking {
    pub(crate) host: String,
    pub(crate) port: u16,
}

fn pipeline(commands: impl IntoIterator<Item = Cmd>) -> Pipeline {
    let commands = commands.into_iter();
    let mut pipeline = Pipeline::with_capacity(commands.size_hint().0);
    for command in commands {
        pipeline.add_command(command);
    }
    pipeline
}

fn primary_of(key: &[u8]) -> SingleNodeRoutingInfo {
    SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master))
}
