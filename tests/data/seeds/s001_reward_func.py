# reward_func.py
import torch

def reward_func(queries, prompts, labels):
    """
    è®¡ç®—ç”Ÿæˆå“åº”çš„è‡ªå®šä¹‰å¥–åŠ±ã€‚
    
    å‚æ•°ï¼š
        queries: List[str] - å®Œæ•´æ–‡æœ¬ï¼ˆæç¤º + å“åº”ï¼‰
        prompts: List[str] - ä»…åŸå§‹æç¤º
        labels: List[str] - çœŸå®æ ‡ç¾ï¼ˆæ¥è‡ª --label_keyï¼‰
    
    è¿”å›ï¼š
        åŒ…å«ä»¥ä¸‹å†…å®¹çš„å—å…¸ï¼š
            - rewards: ç”¨äºä¼˜åŠ¿è®¡ç®—çš„å¼ é‡
            - scores: ç”¨äºåŠ¨æ€è¿‡æ»¤çš„å¼ é‡ï¼ˆ0-1 èŒƒå›´ï¼‰
            - extra_logs: ç”¨äº wandb æ—¥å¿—çš„å—å…¸
    """
    batch_size = len(queries)
    
    # ç¤ºä¾‹ï¼šéšæœºå¥–åŠ±ï¼ˆæ›¿æ¢ä¸ºæ‚¨çš„é€»è¾‘ï¼‰
    # çœŸå®ç¤ºä¾‹ï¼šä»£ç æ‰§è¡Œã€æ•°å¦éªŒè¯ã€æ ¼å¼æ£€æŸ¥
    reward = torch.randint(0, 2, (batch_size,)).float()
    
    return {
        "rewards": reward,           # ç”¨äº RL ä¼˜åŠ¿è®¡ç®—
        "scores": reward,            # ç”¨äºåŠ¨æ€è¿‡æ»¤ï¼ˆ--dynamic_filteringï¼‰
        "extra_logs": {              # è®°å½•åˆ° wandb
            "custom_metric": reward.mean().item(),
        },
    }
