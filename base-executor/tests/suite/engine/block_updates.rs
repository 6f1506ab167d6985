//! Block updates that the engine sends to a gateway that watches the cached blocks.

use std::collections::HashSet;

use shmproto::message::{BlockTier, BlockUpdate, ToGateway};

use super::{
    ACTIVATED, Clock as _, ConnectionId, EngineEvent, EngineHarness, GATEWAY, Generate, ROOMY, mpsc, prompt,
    request, with_prefix,
};

const BLOCK_TOKENS: usize = 16;
const TIERS: [BlockTier; 3] = [BlockTier::Device, BlockTier::Host, BlockTier::Disk];

/// A gateway's knowledge of the blocks, from the updates that it has received.
#[derive(Debug, Default, PartialEq)]
struct KnownBlocks {
    blocks: HashSet<([u8; 32], BlockTier)>,
    tokens: Vec<u32>,
}

impl KnownBlocks {
    fn apply(&mut self, message: ToGateway) {
        let ToGateway::Blocks(updates) = message else { return };
        for update in updates {
            match update {
                BlockUpdate::Cleared => *self = Self::default(),
                BlockUpdate::Added(block) => {
                    let is_known =
                        |parent| TIERS.into_iter().any(|tier| self.blocks.contains(&(parent, tier)));
                    assert!(block.parent.is_none_or(is_known), "a block follows a known one");
                    assert_eq!(block.tokens.len(), BLOCK_TOKENS);
                    self.tokens.extend(&block.tokens);
                    assert!(self.blocks.insert((block.chain, block.tier)));
                }
                BlockUpdate::Removed(block) => _ = self.blocks.remove(&(block.chain, block.tier)),
            }
        }
    }

    fn follow(&mut self, bench: &mut EngineHarness) {
        bench.others.drain(..).for_each(|message| self.apply(message));
    }
}

fn watching() -> (EngineHarness, KnownBlocks) {
    let mut bench = EngineHarness::new(ROOMY);
    bench.others.clear();
    bench.engine.handle(EngineEvent::WatchBlocks(GATEWAY));
    bench.step();
    (bench, KnownBlocks::default())
}

fn ask(bench: &mut EngineHarness, request: Generate) {
    bench.send(request);
    bench.finish();
}

#[test]
fn a_gateway_learns_the_full_blocks_of_a_prompt_and_no_block_twice() {
    let (mut bench, mut known) = watching();
    let tokens = prompt(1, 3 * BLOCK_TOKENS + 5);
    ask(&mut bench, request(1, tokens.clone(), 1));
    known.follow(&mut bench);
    assert_eq!(known.tokens, tokens[..3 * BLOCK_TOKENS]);
    ask(&mut bench, request(2, tokens, 1));
    known.follow(&mut bench);
    assert_eq!(known.blocks.len(), 3, "the second request found all blocks");
}

#[test]
fn a_gateway_that_comes_later_learns_what_is_there_and_both_follow() {
    let (mut bench, mut known) = watching();
    ask(&mut bench, request(1, prompt(1, 100), 1));
    let late = ConnectionId(2);
    let (outbox, mut queue) = mpsc::channel(1024);
    bench.engine.handle(EngineEvent::Connected { connection: late, outbox });
    bench.engine.handle(EngineEvent::WatchBlocks(late));
    ask(&mut bench, request(2, prompt(2, 100), 1));
    known.follow(&mut bench);
    let mut later = KnownBlocks::default();
    while let Ok(message) = queue.try_recv() {
        later.apply(message);
    }
    assert_eq!(known.blocks.len(), 12);
    assert_eq!(later.blocks, known.blocks);
    bench.engine.handle(EngineEvent::Disconnected(GATEWAY));
    let (request, received_at) = (request(3, prompt(3, 40), 1), bench.clock.now());
    bench.engine.handle(EngineEvent::Generate { connection: late, request, received_at });
    bench.finish();
    assert!(queue.try_recv().is_ok(), "the other gateway still watches");
}

#[test]
fn blocks_of_an_adapter_that_is_unloaded_are_removed() {
    let (mut bench, mut known) = watching();
    bench.load(1);
    ask(&mut bench, Generate { adapter: Some([1; 32]), ..request(1, prompt(1, 40), 1) });
    known.follow(&mut bench);
    assert_eq!(known.blocks.len(), 2);
    bench.unload(1);
    bench.step();
    known.follow(&mut bench);
    assert!(known.blocks.is_empty());
}

#[test]
fn blocks_that_tokens_alone_do_not_name_are_left_out() {
    let (mut bench, mut known) = watching();
    bench.load(20);
    bench.load(ACTIVATED);
    ask(&mut bench, with_prefix(request(1, prompt(1, 40), 1)));
    known.follow(&mut bench);
    assert!(known.blocks.is_empty(), "a prefix begins with virtual tokens");
    let mut tokens: Vec<u32> =
        prompt(2, 60).into_iter().map(|token| if token == 7 { 8 } else { token }).collect();
    tokens[40] = 7;
    ask(&mut bench, Generate { adapter: Some([ACTIVATED; 32]), ..request(2, tokens.clone(), 1) });
    known.follow(&mut bench);
    assert_eq!(known.tokens, tokens[..32], "the base's blocks before the invocation");
}
