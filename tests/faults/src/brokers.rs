//! The brokers of the cells of messages. Kafka is the mock cluster of librdkafka, in this process: its brokers speak Kafka's protocol over
//! sockets, and can be taken down, but they keep messages in memory.

use std::time::Duration;

use idem_proxy::{Network, Proxy};
use idem_servers::{Nats, RabbitMq, Redis};
use rdkafka::mocking::MockCluster;
use rdkafka::producer::DefaultProducerContext;

use crate::Error;

const KAFKA_BROKERS: i32 = 3;
const KAFKA_PARTITIONS: i32 = 4;

/// A broker, with the network before it if its clients use no addresses that it tells them.
pub(crate) struct Broker {
    server: Server,
    pub(crate) network: Option<Proxy<Network>>,
}

enum Server {
    Nats(Nats),
    RabbitMq(RabbitMq),
    Redis(Redis),
    KafkaMock(MockCluster<'static, DefaultProducerContext>),
}

impl Broker {
    /// Starts the broker of this name.
    pub(crate) async fn start(name: &str, topic: &str) -> Result<Self, Error> {
        let server = tokio::task::block_in_place(|| Server::start(name, topic))?;
        let network = match server.port() {
            Some(port) => Some(Proxy::to_port(port).await?),
            None => None,
        };
        Ok(Self { server, network })
    }

    /// The URL by which clients reach it through the network.
    pub(crate) fn url(&self) -> String {
        let url = self.server.url();
        match (&self.network, self.server.port()) {
            (Some(network), Some(port)) => url.replace(&format!(":{port}"), &format!(":{}", network.port())),
            _ => url,
        }
    }

    /// Kills it, and starts it again after a while.
    pub(crate) fn crash(&mut self, pause: Duration) -> Result<(), Error> {
        self.kill()?;
        std::thread::sleep(pause);
        self.start_again()
    }

    pub(crate) fn kill(&mut self) -> Result<(), Error> {
        match &mut self.server {
            Server::Nats(server) => server.kill()?,
            Server::RabbitMq(server) => server.kill()?,
            Server::Redis(server) => server.kill()?,
            Server::KafkaMock(cluster) => (1..=KAFKA_BROKERS).try_for_each(|broker| cluster.broker_down(broker))?,
        }
        Ok(())
    }

    pub(crate) fn start_again(&mut self) -> Result<(), Error> {
        match &mut self.server {
            Server::Nats(server) => server.start_again()?,
            Server::RabbitMq(server) => server.start_again()?,
            Server::Redis(server) => server.start_again()?,
            Server::KafkaMock(cluster) => (1..=KAFKA_BROKERS).try_for_each(|broker| cluster.broker_up(broker))?,
        }
        Ok(())
    }
}

impl Server {
    fn start(name: &str, topic: &str) -> Result<Self, Error> {
        Ok(match name {
            "nats" => Self::Nats(Nats::start()?),
            "rabbitmq" => Self::RabbitMq(RabbitMq::start()?),
            // So that a crash loses nothing that was confirmed.
            "redis" => Self::Redis(Redis::start_with(&["--appendonly", "yes", "--appendfsync", "always"])?),
            "kafka-mock" => {
                let cluster = MockCluster::new(KAFKA_BROKERS)?;
                cluster.create_topic(topic, KAFKA_PARTITIONS, KAFKA_BROKERS)?;
                Self::KafkaMock(cluster)
            }
            name => return Err(format!("there is no broker `{name}`").into()),
        })
    }

    fn url(&self) -> String {
        match self {
            Self::Nats(server) => server.url(),
            Self::RabbitMq(server) => server.url(),
            Self::Redis(server) => server.url(),
            Self::KafkaMock(cluster) => format!("kafka://{}", cluster.bootstrap_servers()),
        }
    }

    /// `None` for a cluster, whose brokers tell clients their own addresses.
    fn port(&self) -> Option<u16> {
        if matches!(self, Self::KafkaMock(_)) {
            return None;
        }
        let url = self.url();
        let after_host = url.rsplit(':').next()?;
        after_host.split('/').next()?.parse().ok()
    }
}
