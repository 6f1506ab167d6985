//! A gateway as the executor sees it: a DEALER socket and its received messages.

use std::{collections::HashMap, path::Path};

use shmproto::{
    codec::Wire as _,
    message::{
        ErrorCode, Hello, LoadAdapter, Output, PROTOCOL_VERSION, Stats, ToExecutor, ToGateway, Welcome,
    },
};
use tokio::time::timeout;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _};

pub(crate) use testkit::WATCHDOG;

/// Owner of adapters that all tenants may use.
pub(crate) const EVERYBODY: [u8; 32] = [0; 32];

pub(crate) struct Gateway {
    pub(crate) socket: DealerSocket,
    pub(crate) answers: HashMap<u64, Vec<Output>>,
}

impl Gateway {
    pub(crate) async fn connect(executor: &Path) -> Self {
        let mut socket = DealerSocket::new();
        socket.connect(&format!("ipc://{}", executor.display())).await.unwrap();
        Self { socket, answers: HashMap::new() }
    }

    pub(crate) async fn greet(executor: &Path, instance: u64) -> Self {
        let mut gateway = Self::connect(executor).await;
        gateway.hello(instance).await;
        gateway
    }

    pub(crate) async fn hello(&mut self, instance: u64) -> Welcome {
        self.send(ToExecutor::Hello(Hello { version: PROTOCOL_VERSION, instance })).await;
        loop {
            if let ToGateway::Welcome(welcome) = self.receive().await {
                return welcome;
            }
        }
    }

    pub(crate) async fn send(&mut self, message: ToExecutor) {
        self.socket.send(message.to_bytes().into()).await.unwrap();
    }

    pub(crate) async fn try_receive(&mut self) -> Option<ToGateway> {
        let message = timeout(WATCHDOG, self.socket.recv()).await.expect("the executor answers").ok()?;
        let frames = message.into_vec();
        assert_eq!(frames.len(), 1);
        Some(ToGateway::from_bytes(&frames[0]).unwrap())
    }

    pub(crate) async fn receive(&mut self) -> ToGateway {
        let message = self.try_receive().await.expect("the connection is open");
        if let ToGateway::Outputs(outputs) = &message {
            outputs.iter().for_each(|one| self.answers.entry(one.request).or_default().push(one.clone()));
        }
        message
    }

    pub(crate) async fn answer(&mut self) -> ToGateway {
        loop {
            match self.receive().await {
                ToGateway::Outputs(_) => {}
                answer => return answer,
            }
        }
    }

    pub(crate) async fn outputs(&mut self, request: u64) -> &[Output] {
        let ended =
            |outputs: &Vec<Output>| outputs.iter().any(|one| one.finish.is_some() || one.error.is_some());
        while !self.answers.get(&request).is_some_and(ended) {
            self.receive().await;
        }
        &self.answers[&request]
    }

    pub(crate) async fn tokens(&mut self, request: u64) -> Vec<u32> {
        self.outputs(request).await.iter().flat_map(|one| &one.tokens).map(|one| one.token).collect()
    }

    pub(crate) async fn error(&mut self, request: u64) -> Option<ErrorCode> {
        self.outputs(request).await.last().unwrap().error.as_ref().map(|error| error.code)
    }

    pub(crate) async fn stats(&mut self) -> Stats {
        self.send(ToExecutor::GetStats(77)).await;
        match self.answer().await {
            ToGateway::Stats(stats) => stats,
            other => panic!("stats were asked for: {other:?}"),
        }
    }

    pub(crate) async fn stats_when(&mut self, is_so: impl Fn(&Stats) -> bool) -> Stats {
        let so = async {
            loop {
                let stats = self.stats().await;
                if is_so(&stats) {
                    return stats;
                }
            }
        };
        timeout(WATCHDOG, so).await.expect("the figures become so")
    }

    pub(crate) async fn load(&mut self, request: u64, name: &str) -> ToGateway {
        self.load_for(EVERYBODY, request, name).await
    }

    pub(crate) async fn load_for(&mut self, owner: [u8; 32], request: u64, name: &str) -> ToGateway {
        let call = LoadAdapter::of_one(request, format!("/adapters/{name}"), owner);
        self.send(ToExecutor::LoadAdapter(call)).await;
        self.answer().await
    }
}
