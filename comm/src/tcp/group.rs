//! Groups of some of the ranks: a meeting of their own, at an address that the first member tells the others.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::atomic::Ordering;

use candle_core::{DType, Device, Tensor};

use crate::members::Members;
use crate::{Communicator, Error, Message, Operation, Result};

use super::rendezvous::{Meeting, Options, meet_with};
use super::{InitMethod, Tcp, TcpConfig};

/// Longer than any invitation.
const INVITATION: usize = 128;

impl Tcp {
    /// Called on the members, all at the same place among their operations.
    pub(crate) fn meet_group(&self, ranks: &[usize]) -> Result<(TcpConfig, Meeting, Members)> {
        let place = crate::group::place(self.rank, ranks)?;
        let config = TcpConfig {
            rank: place,
            world_size: ranks.len(),
            init_method: InitMethod::Tcp { host: "127.0.0.1".into(), port: 1 },
            ..self.config.clone()
        };
        let members = Members::some(ranks.iter().map(|rank| self.members.world_rank(*rank)));
        let (config, listener) = match (ranks.len(), place) {
            (1, _) => (config, None),
            (_, 0) => self.invite(config, ranks)?,
            _ => (self.accept(config, ranks[0])?, None),
        };
        let meeting = meet_with(&config, Options { listener, ..Options::default() })?;
        Ok((config, meeting, members))
    }

    /// The first member opens a meeting point.
    fn invite(&self, config: TcpConfig, ranks: &[usize]) -> Result<(TcpConfig, Option<TcpListener>)> {
        let number = self.groups.fetch_add(1, Ordering::Relaxed);
        let opened = TcpListener::bind((config.bind, 0)).and_then(|listener| {
            let port = listener.local_addr()?.port();
            Ok((listener, port))
        });
        let mut messages = Vec::new();
        for &to in &ranks[1..] {
            // An invitation to nowhere tells the others that there will be no group.
            let text = match &opened {
                Ok((_, port)) => format!("{} {number}", SocketAddr::new(self.address_for(to), *port)),
                Err(_) => String::new(),
            };
            let mut bytes = text.into_bytes();
            bytes.resize(INVITATION, b' ');
            messages.push(Message::Send { tensor: Tensor::from_vec(bytes, INVITATION, &Device::Cpu)?, to });
        }
        self.run(Operation::Batch { messages })?;
        let (listener, port) = opened.map_err(|reason| Error::Listen {
            address: SocketAddr::new(config.bind, 0).to_string(),
            reason: reason.to_string(),
        })?;
        let own = SocketAddr::new(config.bind, port);
        Ok((self.at(config, own, self.rank, number), Some(listener)))
    }

    /// The others hear of it.
    fn accept(&self, config: TcpConfig, from: usize) -> Result<TcpConfig> {
        let tensor = Tensor::zeros(INVITATION, DType::U8, &Device::Cpu)?;
        self.run(Operation::Recv { tensor: tensor.clone(), from })?;
        let text = String::from_utf8_lossy(&tensor.to_vec1::<u8>()?).into_owned();
        let parse = |text: &str| {
            let (address, number) = text.trim().split_once(' ')?;
            Some((address.parse().ok()?, number.parse().ok()?))
        };
        let (address, number) = parse(&text).ok_or_else(|| {
            Error::system("a new group", format!("rank {from} could not open a meeting point for it"))
        })?;
        Ok(self.at(config, address, from, number))
    }

    fn at(&self, config: TcpConfig, address: SocketAddr, first: usize, number: u64) -> TcpConfig {
        let (host, port) = (address.ip().to_string(), address.port());
        let job_id = format!("{}/{first}.{number}", self.config.job_id);
        TcpConfig { init_method: InitMethod::Tcp { host, port }, job_id, ..config }
    }

    /// The address at which a rank reaches this one.
    fn address_for(&self, rank: usize) -> IpAddr {
        self.own_ips.get(rank).copied().unwrap_or(self.config.bind)
    }
}
