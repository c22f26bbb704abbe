//! The Redis store keeps the contract: on one server, on the primary that Sentinels name, in a Cluster, and with every
//! change awaited on a replica.

use std::net::SocketAddr;

use crate::support::{addresses, primaries, subject};
use idem_servers::{
    Redis, RedisCluster, RedisSentinel, redis_cluster_url, redis_command, redis_sentinel_url, redis_url,
};
use idem_testkit::Subject;

async fn one_server() -> Subject {
    subject(&redis_url(), addresses(&redis_url()), |config| config).await
}

async fn sentinel() -> Subject {
    subject(&redis_sentinel_url(), vec![named_by_sentinels()], |config| config).await
}

async fn cluster() -> Subject {
    subject(&redis_cluster_url(), primaries(&addresses(&redis_cluster_url())), |config| config).await
}

async fn on_replicas() -> Subject {
    subject(&redis_sentinel_url(), vec![named_by_sentinels()], |config| config.min_replicas(2)).await
}

async fn cluster_on_replicas() -> Subject {
    subject(&redis_cluster_url(), primaries(&addresses(&redis_cluster_url())), |config| config.min_replicas(1)).await
}

fn named_by_sentinels() -> SocketAddr {
    let url = redis_sentinel_url();
    let (_, service) = url.rsplit_once('/').unwrap();
    let named = redis_command(addresses(&url)[0], &["SENTINEL", "GET-MASTER-ADDR-BY-NAME", service]).unwrap();
    let [host, port] = named.items() else { panic!("the Sentinels name {named:?}") };
    format!("{}:{}", host.text().unwrap(), port.text().unwrap()).parse().unwrap()
}

idem_testkit::conformance!(on_one_server, one_server);
idem_testkit::conformance!(through_sentinel, sentinel);
idem_testkit::conformance!(in_a_cluster, cluster);
idem_testkit::conformance!(on_replicas_too, on_replicas);
idem_testkit::conformance!(in_a_cluster_on_replicas_too, cluster_on_replicas);

idem_testkit::resolve_conformance!(resolving_on_one_server, one_server);
idem_testkit::resolve_conformance!(resolving_on_replicas_too, on_replicas);
idem_testkit::resolve_conformance!(resolving_in_a_cluster, cluster);

// Separate servers: the keys of other tests would disturb thousands of sequences.

async fn own_server() -> Subject {
    let server = Redis::start().unwrap();
    subject(&server.url(), vec![server.port()], |config| config).await.keeping(server)
}

async fn own_sentinel() -> Subject {
    let group = RedisSentinel::start().unwrap();
    subject(&group.url(), vec![group.primary_port().unwrap()], |config| config).await.keeping(group)
}

async fn own_cluster() -> Subject {
    let cluster = RedisCluster::start().unwrap();
    let ports = cluster.primaries().unwrap().iter().map(|primary| primary.port).collect();
    subject(&cluster.url(), ports, |config| config).await.keeping(cluster)
}

async fn own_replicas() -> Subject {
    let group = RedisSentinel::start().unwrap();
    subject(&group.url(), vec![group.primary_port().unwrap()], |config| config.min_replicas(2)).await.keeping(group)
}

/// Each verb is a round trip to a server.
const CASES: u32 = 300;

idem_testkit::state_machine!(the_store_follows_the_model_on_one_server, own_server, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_through_sentinel, own_sentinel, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_in_a_cluster, own_cluster, CASES);
idem_testkit::state_machine!(the_store_follows_the_model_on_replicas_too, own_replicas, CASES);

idem_testkit::inspect_conformance!(inspecting_on_one_server, own_server);
idem_testkit::inspect_conformance!(inspecting_through_sentinel, own_sentinel);
