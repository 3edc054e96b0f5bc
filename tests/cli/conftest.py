from tests.process.box import box

__all__ = ["box"]
