//! A Redis Cluster.

mod create;
mod migrate;
mod view;

use view::{Member, SLOTS};

pub use view::ClusterPrimary;

use super::Reply;
use super::group::{Group, field};
use super::node::{Node, Program};
use crate::server::Server;
use crate::setup::expect;
use crate::setup::redis::{NODES, PRIMARIES, arguments};
use crate::{Error, port};

/// A failed primary is replaced soon, and other slots are still served meanwhile. Replicas do not migrate, so that each primary
/// keeps one. A full resynchronization starts without waiting for further replicas.
const CLUSTERING: &str = "cluster-enabled yes\ncluster-node-timeout 1500\ncluster-require-full-coverage no\n\
    cluster-allow-replica-migration no\nrepl-diskless-sync-delay 0\nrepl-ping-replica-period 1\n";

/// A private Redis Cluster: three primaries with one replica each, on 127.0.0.1 without passwords.
///
/// The nodes run from the `redis-server` on PATH. If a primary does not answer for 1.5 seconds, its replica replaces it, mostly
/// within another two seconds. Until then the slots of other primaries are served (`cluster-require-full-coverage no`). No
/// replica moves to another primary (`cluster-allow-replica-migration no`).
///
/// Other settings are those of a [`Redis`](crate::Redis). A killed node keeps its part in the cluster, but no data. A primary
/// that restarts before it was replaced is empty, and so is its replica then.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Group,
    program: Program,
}

impl RedisCluster {
    /// Starts the nodes, and waits as [`wait_until_ok`](Self::wait_until_ok) does.
    ///
    /// # Errors
    ///
    /// - [`Error::Missing`] if this machine has no `redis-server`.
    /// - An error if the nodes do not form a cluster within a minute.
    pub fn start() -> Result<RedisCluster, Error> {
        RedisCluster::start_with(&[])
    }

    /// [`start`](Self::start) with arguments of `redis-server` for each node:
    /// `&["--cluster-require-full-coverage", "yes"]`.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start).
    pub fn start_with(settings: &[&str]) -> Result<RedisCluster, Error> {
        let program = Program::find("redis-server")?;
        let settings = &arguments(settings);
        let mut nodes = Group::default();
        for _ in 0..NODES {
            nodes.push(Node::start(&program, port::free_with_bus, CLUSTERING, settings)?);
        }
        create::create(&nodes)?;
        let cluster = RedisCluster { nodes, program };
        cluster.wait_until_ok()?;
        Ok(cluster)
    }

    /// The URL with all nodes: `redis+cluster://127.0.0.1:PORT,127.0.0.1:PORT,…`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis+cluster://{}", self.nodes.addresses())
    }

    /// The version, as in `Redis 7.0.15`.
    #[must_use]
    pub fn version(&self) -> &str {
        self.program.version()
    }

    /// The program.
    #[must_use]
    pub fn origin(&self) -> &str {
        self.program.origin()
    }

    /// The ports of all nodes. They stay the same.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        self.nodes.ports()
    }

    /// Each node that has slots, by its own claim: its port and these slots. Paused and stopped nodes are not asked.
    ///
    /// If two nodes claim a slot, as after the pause of a primary that was replaced, the one with the newer configuration comes
    /// first.
    ///
    /// # Errors
    ///
    /// If a node does not answer.
    pub fn primaries(&self) -> Result<Vec<ClusterPrimary>, Error> {
        let own = self.nodes.up().map(own_view).collect::<Result<Vec<Member>, Error>>()?;
        let mut own: Vec<Member> = own.into_iter().filter(|member| !member.slots.is_empty()).collect();
        own.sort_by_key(|member| std::cmp::Reverse(member.epoch));
        Ok(own.into_iter().map(|member| ClusterPrimary { port: member.port, slots: member.slots }).collect())
    }

    /// The port of the node that claims the slot (0 to 16383), as in [`primaries`](Self::primaries).
    ///
    /// # Errors
    ///
    /// If no running node has it.
    pub fn owner_of_slot(&self, slot: u16) -> Result<u16, Error> {
        let owner = self.primaries()?.into_iter().find(|primary| primary.has(slot));
        owner.map(|primary| primary.port).ok_or_else(|| Error::failed(format!("no node that runs has the slot {slot}")))
    }

    /// The port of the replica of the primary on this port, by the primary's node list.
    ///
    /// # Errors
    ///
    /// If the node does not answer or has no replica.
    pub fn replica_of(&self, primary: u16) -> Result<u16, Error> {
        let members = members(self.nodes.get(primary)?)?;
        let id = members.iter().find(|member| member.is("myself")).map(|member| member.id.as_str());
        let replica = members.iter().find(|member| member.primary.is_some() && member.primary.as_deref() == id);
        replica.map(|member| member.port).ok_or_else(|| Error::failed(format!("{primary} has no replica")))
    }

    /// Suspends a node, as [`Redis::pause`](crate::Redis::pause) does.
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn pause(&mut self, port: u16) -> Result<(), Error> {
        self.nodes.get_mut(port)?.pause()
    }

    /// Ends a [`pause`](Self::pause).
    ///
    /// # Errors
    ///
    /// If it is not running.
    pub fn resume(&mut self, port: u16) -> Result<(), Error> {
        self.nodes.get_mut(port)?.resume()
    }

    /// Crashes a node: `kill -9`. Does nothing if it is not running.
    ///
    /// # Errors
    ///
    /// If it does not end within a minute.
    pub fn kill(&mut self, port: u16) -> Result<(), Error> {
        self.nodes.get_mut(port)?.kill()
    }

    /// Starts a node again after [`kill`](Self::kill), on the same port and folder.
    ///
    /// # Errors
    ///
    /// If it is running, or does not answer within a minute.
    pub fn start_again(&mut self, port: u16) -> Result<(), Error> {
        self.nodes.get_mut(port)?.start_again()
    }

    /// Waits until all running nodes agree which node serves which slot, and every slot is served. After the failure of a
    /// primary, this waits for its replacement.
    ///
    /// # Errors
    ///
    /// If it takes more than a minute.
    pub fn wait_until_served(&self) -> Result<(), Error> {
        self.nodes.wait_until_sound(|| self.check_slots())
    }

    /// Waits until the cluster is complete: all nodes agree which node serves which slot and see all other nodes, and each
    /// primary has a replica in sync.
    ///
    /// # Errors
    ///
    /// - Immediately, if a node is paused or does not run.
    /// - If it takes more than a minute.
    pub fn wait_until_ok(&self) -> Result<(), Error> {
        self.nodes.expect_all_up()?;
        self.nodes.wait_until_sound(|| {
            self.check_slots()?;
            self.nodes.nodes().iter().try_for_each(check_node)?;
            expect("the number of primaries", self.primaries()?.len(), PRIMARIES)
        })
    }

    /// Moves a slot with its keys from one primary to another, in the steps that the specification of Redis Cluster prescribes.
    ///
    /// Clients can go on meanwhile. Ten keys move at a time, so that clients meet the redirection `ASK`, and `TRYAGAIN` for
    /// commands whose keys are on both sides.
    ///
    /// Replicas learn of it a moment later; [`wait_until_ok`](Self::wait_until_ok) waits for them.
    ///
    /// # Errors
    ///
    /// If a node refuses a step, for example because `from` does not have the slot. Completed steps stay. Unless `to` has the
    /// slot already, the same call continues the migration.
    pub fn migrate_slot(&self, slot: u16, from: u16, to: u16) -> Result<(), Error> {
        migrate::migrate(&self.nodes, slot, self.nodes.get(from)?, self.nodes.get(to)?)
    }

    /// Fails unless all running nodes agree which of them serves which slot.
    fn check_slots(&self) -> Result<(), Error> {
        let claims = self.primaries()?;
        let owner = |slot: u16| {
            let mut owners = claims.iter().filter(|primary| primary.has(slot));
            match (owners.next(), owners.next()) {
                (Some(owner), None) => Ok(owner.port),
                (None, _) => Err(Error::failed(format!("nobody serves slot {slot}"))),
                (Some(_), Some(_)) => Err(Error::failed(format!("several nodes serve slot {slot}"))),
            }
        };
        let owners = (0..SLOTS).map(owner).collect::<Result<Vec<u16>, Error>>()?;
        for node in self.nodes.up() {
            let info = node.ask(&["CLUSTER", "INFO"])?;
            expect(format!("the cluster's state in {}", node.port()), field(node, &info, "cluster_state")?, "ok")?;
            for member in members(node)?.iter().filter(|member| !member.slots.is_empty()) {
                let agree =
                    member.slots.iter().flat_map(Clone::clone).all(|slot| owners[usize::from(slot)] == member.port);
                expect(format!("whether {} agrees on {}", node.port(), member.port), agree, true)?;
            }
        }
        Ok(())
    }
}

/// Fails unless the node sees all other nodes, and has the replication link that belongs to its role.
fn check_node(node: &Node) -> Result<(), Error> {
    let members = members(node)?;
    expect(format!("the number of nodes in {}", node.port()), members.len(), NODES)?;
    let doubtful = members.iter().filter(|member| member.is_doubtful()).count();
    expect(format!("the number of nodes that {} misses", node.port()), doubtful, 0)?;
    for primary in members.iter().filter(|member| !member.slots.is_empty()) {
        let replicas = members.iter().filter(|member| member.primary.as_ref() == Some(&primary.id)).count();
        expect(format!("the number of replicas of {} in {}", primary.port, node.port()), replicas, 1)?;
    }
    let info = node.ask(&["INFO", "replication"])?;
    if field(node, &info, "role")? == "slave" {
        let link = field(node, &info, "master_link_status")?;
        return expect(format!("the link of {} to its primary", node.port()), link, "up");
    }
    let is_online = info.field("slave0").is_some_and(|line| line.contains("state=online"));
    expect(format!("whether {} has a replica in sync", node.port()), is_online, true)
}

/// The nodes that a node knows, including itself.
fn members(node: &Node) -> Result<Vec<Member>, Error> {
    let reply = node.ask(&["CLUSTER", "NODES"])?;
    view::parse(reply.text().unwrap_or_default())
}

/// A node's own entry in its node list.
fn own_view(node: &Node) -> Result<Member, Error> {
    let own = members(node)?.into_iter().find(|member| member.is("myself"));
    own.ok_or_else(|| Error::failed(format!("the node on port {} does not know itself", node.port())))
}

fn id_of(node: &Node) -> Result<String, Error> {
    let reply = node.ask(&["CLUSTER", "MYID"])?;
    Ok(reply.text().unwrap_or_default().to_owned())
}
