class FCFS:
    def first(self, waiting, step):
        return 0

    def charge(self, request, n_tokens):
        pass
