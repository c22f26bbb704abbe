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

/// Who fails is replaced soon. Slots whose primary has failed are no reason to refuse the others. Replicas stay where they
/// are, so that each primary keeps one; and they need not wait for others that could want the same data.
const CLUSTERING: &str = "cluster-enabled yes\ncluster-node-timeout 1500\ncluster-require-full-coverage no\n\
    cluster-allow-replica-migration no\nrepl-diskless-sync-delay 0\nrepl-ping-replica-period 1\n";

/// A Redis Cluster of this value's own: three primaries with a replica each, on 127.0.0.1 without passwords.
///
/// The nodes run from the `redis-server` on PATH. A primary that does not answer for 1.5 seconds is replaced by its
/// replica, mostly within another two. Until then the slots of other primaries are served
/// (`cluster-require-full-coverage no`); no replica moves to another primary (`cluster-allow-replica-migration no`).
///
/// Other settings are those of a [`Redis`](crate::Redis). A node keeps its part in the cluster when it is killed, but no
/// data: a primary that starts again before it was replaced is empty, as is its replica then.
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
    /// [`Error::Missing`] if this machine has no `redis-server`; otherwise an error if the nodes do not come together
    /// within a minute.
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

    /// `redis+cluster://127.0.0.1:PORT,127.0.0.1:PORT,…` with all nodes.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis+cluster://{}", self.nodes.addresses())
    }

    /// As in `Redis 7.0.15`.
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

    /// The port of each node that has slots, with these, by its own word. Paused nodes and those that do not run are not
    /// asked. Where two claim a slot, as after the pause of a primary that was replaced, the one with the newer
    /// configuration stands first.
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

    /// The port of the node that has the slot (0 to 16383), by its own word as in [`primaries`](Self::primaries).
    ///
    /// # Errors
    ///
    /// If no node that runs has it.
    pub fn owner_of_slot(&self, slot: u16) -> Result<u16, Error> {
        let owner = self.primaries()?.into_iter().find(|primary| primary.has(slot));
        owner.map(|primary| primary.port).ok_or_else(|| Error::failed(format!("no node that runs has the slot {slot}")))
    }

    /// The port of the replica of the primary on this port, as the primary's own list has it.
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

    /// Holds a node up, as [`Redis::pause`](crate::Redis::pause).
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

    /// Crashes a node: `kill -9`. One that is not running stays so.
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

    /// Waits until all nodes that are up agree who of them serves which slot, and none is left out: after the failure of a
    /// primary, until it is replaced.
    ///
    /// # Errors
    ///
    /// If it takes more than a minute.
    pub fn wait_until_served(&self) -> Result<(), Error> {
        self.nodes.wait_until_sound(|| self.check_slots())
    }

    /// Waits until everything is as it should be: all nodes agree who serves which slot and miss nobody, and each primary
    /// has a replica that is in sync.
    ///
    /// # Errors
    ///
    /// At once if a node is paused or does not run; otherwise if it takes more than a minute.
    pub fn wait_until_ok(&self) -> Result<(), Error> {
        self.nodes.expect_all_up()?;
        self.nodes.wait_until_sound(|| {
            self.check_slots()?;
            self.nodes.nodes().iter().try_for_each(check_node)?;
            expect("the number of primaries", self.primaries()?.len(), PRIMARIES)
        })
    }

    /// Moves a slot with its keys from one primary to another while clients go on, in the steps that the specification of
    /// Redis Cluster prescribes. Ten keys move at a time, so that clients meet the redirection `ASK`, and `TRYAGAIN` for
    /// commands whose keys are on both sides.
    ///
    /// Replicas hear of it a moment later; [`wait_until_ok`](Self::wait_until_ok) waits for them.
    ///
    /// # Errors
    ///
    /// If a node refuses a step, as when `from` does not have the slot. What was done stays, and unless `to` has the slot
    /// already, the same call goes on with it.
    pub fn migrate_slot(&self, slot: u16, from: u16, to: u16) -> Result<(), Error> {
        migrate::migrate(&self.nodes, slot, self.nodes.get(from)?, self.nodes.get(to)?)
    }

    /// An objection unless all nodes that are up agree who of them serves which slot.
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

/// An objection unless the node misses nobody, and has the link that belongs to its role.
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

/// What a node knows of all, itself among them.
fn members(node: &Node) -> Result<Vec<Member>, Error> {
    let reply = node.ask(&["CLUSTER", "NODES"])?;
    view::parse(reply.text().unwrap_or_default())
}

/// What a node knows of itself.
fn own_view(node: &Node) -> Result<Member, Error> {
    let own = members(node)?.into_iter().find(|member| member.is("myself"));
    own.ok_or_else(|| Error::failed(format!("the node on port {} does not know itself", node.port())))
}

fn id_of(node: &Node) -> Result<String, Error> {
    let reply = node.ask(&["CLUSTER", "MYID"])?;
    Ok(reply.text().unwrap_or_default().to_owned())
}
