//! A connection to servers of any kind, and what may be asked of it.

use redis::aio::{ConnectionLike, MultiplexedConnection};
use redis::cluster_async::ClusterConnection;
use redis::cluster_routing::{MultipleNodeRoutingInfo, Route, RoutingInfo, SingleNodeRoutingInfo, SlotAddr};
use redis::{Cmd, Pipeline, RedisResult, Value};

/// A connection that may be shared: what is asked on it at once goes out at once.
#[derive(Clone)]
pub(crate) enum Connection {
    One(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Connection {
    /// Sends a command to the server that has `key`.
    pub(crate) async fn send(&mut self, command: Cmd, key: &[u8]) -> RedisResult<Value> {
        match self {
            Self::One(connection) => connection.req_packed_command(&command).await,
            Self::Cluster(connection) => {
                connection.route_command(command, RoutingInfo::SingleNode(primary_of(key))).await
            }
        }
    }

    /// Sends commands to the server that has `key`, on one connection to it.
    pub(crate) async fn send_all(&mut self, pipeline: Pipeline, key: &[u8]) -> RedisResult<Vec<Value>> {
        let count = pipeline.len();
        match self {
            Self::One(connection) => connection.req_packed_commands(&pipeline, 0, count).await,
            Self::Cluster(connection) => connection.route_pipeline(pipeline, 0, count, primary_of(key)).await,
        }
    }

    /// What every primary answers.
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

fn primary_of(key: &[u8]) -> SingleNodeRoutingInfo {
    SingleNodeRoutingInfo::SpecificNode(Route::with_key(key, SlotAddr::Master))
}
